"""From text to streaming statistics."""

from kvcompile.calibration.statistics import OBSERVER, Moments, Recorder, recording
from kvcompile.calibration.text import Corpus, read_corpus, tokenize_corpus

__all__ = ["OBSERVER", "Corpus", "Moments", "Recorder", "read_corpus", "recording", "tokenize_corpus"]
