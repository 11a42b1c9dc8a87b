"""Files of tokens of any size and their mixtures, without torch: ours, nanoGPT's, llm.c's and Megatron's.

What makes tensors of them is in ``launcher/data/packing/``; nothing here makes tokens out of text.
"""
