"""From text to streaming statistics."""

from kvcompile.calibration.statistics import OBSERVER, AttentionSample, Moments, Recorder, recording
from kvcompile.calibration.text import Corpus, read_corpus, tokenize_corpus

__all__ = [
    "OBSERVER",
    "AttentionSample",
    "Corpus",
    "Moments",
    "Recorder",
    "read_corpus",
    "recording",
    "tokenize_corpus",
]
