"""A cache that has been used for long holds what a new one would, and nothing else."""

import psutil
import pytest
import torch

import kvcompile
from kvcompile.runtime.cache import PackedCache
from tests.sessions import Session


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(converted):
    return kvcompile.load(converted)[0]


def test_long_sessions_of_random_rows(model) -> None:
    """The rows go through the layers' own update and attention; 12,000 tokens in ten conversations."""
    session, resident = Session(model, 1, real_model=False), []
    for number in range(10):
        session.conversation(1200, keep=number % 2 == 1)
        resident.append(psutil.Process().memory_info().rss)
    assert session.tokens > 12_000
    assert session.edits > 30
    assert session.pages > 100
    assert session.full > 0, "a pool of fixed size was never full"
    assert max(resident[5:]) < max(resident[:5]) + (24 << 20)


def test_long_sessions_of_the_model(model) -> None:
    session = Session(model, 2, real_model=True)
    for number in range(3):
        session.conversation(1200, keep=number > 0)
    assert session.tokens > 3600


def test_a_conversation_is_like_the_first_on_a_used_cache(model) -> None:
    """Reset or emptied by cropping: the next conversation gets the same logits, and the pool does not grow."""
    ids = torch.randint(2, 4000, (2, 420), generator=torch.Generator().manual_seed(0))
    cache = kvcompile.new_cache(model, sink=16, recent=64)

    def run(cache: PackedCache) -> torch.Tensor:
        with torch.inference_mode():
            model(ids[:, :400], past_key_values=cache)
            return torch.stack([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(400, 420)])

    first, pages = run(cache), cache.stores[0].pages_LPKX.shape[1]
    for empty in (lambda: cache.crop(-cache.get_seq_length()), cache.reset, lambda: cache.crop(-420)):
        empty()
        assert torch.equal(run(cache), first)
        assert cache.stores[0].pages_LPKX.shape[1] == pages
