"""Loads or trains the tokenizer of a corpus; BPE is trained once, on a sample of the files."""

from __future__ import annotations

from pathlib import Path

from launcher.data import bounded_tokenizer
from launcher.data.prepare import shard_record
from launcher.data.prepare.child_processes import TrainTokenizer, train
from launcher.data.prepare.corpus_digest import TextCorpus
from launcher.data.prepare.documents import Position
from launcher.data.prepare.vocabulary import Vocabulary, trained_end, vocabulary
from launcher.process_pool import Workers
from launcher.untrusted.files import read_text

SAMPLE = 32 << 20  # bytes of text that BPE is trained on
SAMPLED = 32  # the most files that this text comes from


def corpus_vocabulary(corpus: TextCorpus, folder: Path, crew: Workers) -> Vocabulary:
    """Returns the vocabulary, and writes its tokenizer.json to ``folder``. BPE is trained only once."""
    file = folder / shard_record.TOKENIZER
    trained = None
    if corpus.settings.tokenizer == "bpe":
        trained = (
            read_text(file, bounded_tokenizer.LONGEST) if file.is_file() else train(crew, _sample(corpus))
        )
    made = vocabulary(corpus.settings, trained)
    if made.tokenizer is not None:
        shard_record.write_text(file, made.tokenizer)
    return made


def _sample(corpus: TextCorpus) -> TrainTokenizer:
    """Returns a task that trains on the first bytes of up to ``SAMPLED`` files, equally many of each."""
    settings = corpus.settings
    assert settings.vocab_size is not None
    step = -(-len(corpus.files) // SAMPLED)
    some = range(0, len(corpus.files), step)
    taken = []
    for index in some:
        size = 0
        for block in corpus.blocks(Position(index)):
            if block.start.file != index or size >= SAMPLE // len(some):
                break
            taken.append(corpus.task(block))
            size += block.nbytes
    return TrainTokenizer(taken, settings.vocab_size, trained_end(settings))
