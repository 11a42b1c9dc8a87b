"""The rule function of every operator that has one, by its name without the overload."""

from __future__ import annotations

from collections.abc import Callable

from launcher.extras.device_matrix.op_graph import OpGraph, OpNode
from launcher.extras.device_matrix.op_rule import OpRule
from launcher.extras.device_matrix.rules import elementwise, lookups, products, reductions, views
from launcher.extras.device_matrix.rules.letters import (
    LetteredCall,
    Lettering,
    OperatorCall,
    rule_from,
    uncut_letters,
)

RuleFunction = Callable[[OperatorCall], Lettering]


def _same(rule: RuleFunction, kinds: str) -> dict[str, RuleFunction]:
    return dict.fromkeys(kinds.split(), rule)


RULES: dict[str, RuleFunction] = {
    **dict.fromkeys(elementwise.KINDS, elementwise.elementwise),
    **_same(elementwise.prelu, "prelu _prelu_kernel"),
    **_same(elementwise.triangle, "tril triu"),
    **_same(elementwise.as_complex, "view_as_complex view_as_real"),
    **_same(products.linear, "linear"),
    **_same(products.matmul, "matmul mm bmm mv dot"),
    **_same(products.addmm, "addmm baddbmm addmv"),
    **_same(products.outer, "outer ger"),
    **_same(products.bilinear, "bilinear"),
    **_same(products.tensordot, "tensordot"),
    **_same(products.einsum, "einsum"),
    **_same(
        views.reshape, "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as"
    ),
    **_same(views.reshape, "ravel atleast_1d atleast_2d atleast_3d"),
    **_same(views.permute, "permute"),
    **_same(views.transpose, "transpose swapaxes swapdims"),
    **_same(views.matrix_transpose, "t mT mH adjoint"),
    **_same(views.reverse, "numpy_T"),
    **_same(views.movedim, "movedim moveaxis"),
    **_same(views.expand, "expand broadcast_to expand_as"),
    **_same(views.broadcast_tensors, "broadcast_tensors"),
    **_same(views.repeat, "repeat tile"),
    **_same(views.repeat_interleave, "repeat_interleave"),
    **_same(views.without_dim, "cumsum cumprod cummax cummin logcumsumexp"),
    **_same(views.along_last, "topk sort argsort"),
    **_same(views.roll, "roll"),
    **_same(views.flip, "flip"),
    **_same(views.piece, "slice narrow"),
    **_same(views.select, "select unbind"),
    **_same(views.split, "split split_with_sizes chunk tensor_split"),
    **_same(views.cat, "cat concat concatenate"),
    **_same(views.stack, "stack"),
    **_same(views.scatter_piece, "slice_scatter select_scatter"),
    **_same(views.windows, "unfold"),
    **_same(views.joined_columns, "hstack"),
    **_same(views.pad, "pad constant_pad_nd"),
    **_same(views.diagonal, "diagonal"),
    **_same(views.meshgrid, "meshgrid"),
    **_same(views.channel_blocks, "pixel_shuffle pixel_unshuffle im2col col2im"),
    **_same(reductions.sum_and_mean, "sum mean nansum count_nonzero"),
    **_same(reductions.uncut, "amax amin argmax argmin any all prod median nanmedian mode var std var_mean"),
    **_same(reductions.uncut, "std_mean linalg_vector_norm kthvalue aminmax norm"),
    **_same(reductions.logsumexp, "logsumexp"),
    **_same(reductions.softmax, "softmax log_softmax _softmax _log_softmax"),
    **_same(reductions.cosine_similarity, "cosine_similarity"),
    **_same(reductions.extreme, "max min"),
    **_same(reductions.half_of_last, "glu"),
    **_same(reductions.layer_norm, "layer_norm rms_norm"),
    **_same(reductions.batch_norm, "batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"),
    **_same(reductions.group_norm, "group_norm"),
    **_same(reductions.instance_norm, "instance_norm"),
    **_same(products.attention, "scaled_dot_product_attention"),
    **_same(products.convolution, "conv1d conv2d conv3d"),
    **_same(products.convolution, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_same(products.by_place, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    **_same(products.by_place, "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices"),
    **_same(products.by_place, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    **_same(products.by_place, "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"),
    **_same(products.by_place, "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"),
    **_same(products.by_place, "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"),
    **_same(products.by_place, "_upsample_nearest_exact1d _upsample_nearest_exact2d"),
    **_same(products.by_place, "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
    **_same(lookups.embedding, "embedding"),
    **_same(lookups.index_select, "index_select"),
    **_same(lookups.gather, "gather take_along_dim"),
    **_same(lookups.index, "index"),
    **_same(lookups.scatter, "scatter scatter_add scatter_reduce"),
    **_same(lookups.index_add, "index_add index_copy index_fill"),
    **_same(lookups.one_hot, "one_hot"),
    **dict.fromkeys(reductions.REDUCTION_AT, reductions.pointwise),
    **_same(reductions.cross_entropy, "cross_entropy_loss"),
    **_same(reductions.nll_loss, "nll_loss nll_loss_nd nll_loss2d"),
    **_same(views.filled, "zeros ones full empty new_zeros new_ones new_full new_empty"),
    **_same(views.counted, "arange linspace logspace eye scalar_tensor tril_indices triu_indices"),
    **_same(views.counted, "rand randn randint randperm"),
    **_same(views.dropout, "dropout native_dropout"),
    **_same(views.feature_dropout, "feature_dropout"),
    **_same(views.drawn, "bernoulli rand_like randn_like randint_like"),
}


def rule_of(node: OpNode, graph: OpGraph) -> OpRule | None:
    """Returns how ``node`` may be cut; ``None`` if no rule is known."""
    call = OperatorCall(node, graph)
    rule = RULES.get(node.kind)
    lettered_call = rule(call) if rule is not None else None
    return None if lettered_call is None else rule_from(call, lettered_call)


def uncut_rule(node: OpNode, graph: OpGraph) -> OpRule:
    """Returns a rule for an operator without one: every tensor is replicated."""
    call = OperatorCall(node, graph)
    return rule_from(call, LetteredCall(uncut_letters(call.ins), uncut_letters(call.outs)))
