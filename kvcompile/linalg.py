"""Orthogonal transforms in the row-vector convention: a row ``x [1, D]`` becomes ``x @ R`` with ``R [D, D]``."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> Tensor:
    """The matrix ``Q[i, j] = chi(i - j)`` of quadratic residues modulo a prime ``q``; int64 ``[q, q]``."""
    residues = {i * i % q for i in range(1, q)}
    chi = torch.tensor([0] + [1 if i in residues else -1 for i in range(1, q)])
    i = torch.arange(q)
    return chi[(i[:, None] - i[None, :]) % q]


def _paley(order: int) -> Tensor | None:
    """A Hadamard matrix of Paley's first or second construction, entries +-1, or None where neither applies."""
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        q = order - 1
        h = torch.ones(order, order, dtype=torch.int64)
        h[1:, 0] = -1
        h[1:, 1:] = _jacobsthal(q) + torch.eye(q, dtype=torch.int64)
        return h
    q = order // 2 - 1
    if order % 2 == 0 and _is_prime(q) and q % 4 == 1:
        conference = torch.ones(q + 1, q + 1, dtype=torch.int64)
        conference[0, 0] = 0
        conference[1:, 1:] = _jacobsthal(q)
        off, diagonal = torch.tensor([[1, 1], [1, -1]]), torch.tensor([[1, -1], [-1, -1]])
        return torch.kron(conference, off) + torch.kron(torch.eye(q + 1, dtype=torch.int64), diagonal)
    return None


def _split_order(order: int) -> tuple[int, int] | None:
    """``(m, 2^k)`` with ``order = m 2^k`` and a known Hadamard matrix of order ``m``; the smallest such ``m``."""
    power = 1
    while order % (2 * power) == 0:
        power *= 2
    while power:
        m = order // power
        if m == 1 or _paley(m) is not None:
            return m, power
        power //= 2
    return None


def is_hadamard_order(order: int) -> bool:
    """Whether `hadamard` can build this order: 2^k, and m 2^k for the Paley orders m (12, 20, 24, 28, 36, 44 ...)."""
    return order > 0 and _split_order(order) is not None


@cache
def hadamard(order: int) -> Tensor:
    """The orthonormal Hadamard matrix ``H [order, order]``, float64.

    For powers of two this is Sylvester's (symmetric, natural order); for ``m 2^k`` it is Sylvester(2^k) (x) Paley(m).
    Raises ValueError for orders without a known construction.
    """
    split = _split_order(order) if order > 0 else None
    if split is None:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    m, power = split
    h = torch.ones(1, 1, dtype=torch.int64)
    for _ in range(power.bit_length() - 1):
        h = torch.kron(torch.tensor([[1, 1], [1, -1]]), h)
    if m > 1:
        paley = _paley(m)
        assert paley is not None
        h = torch.kron(h, paley)
    return h.double() / order**0.5


@cache
def bit_reversal(order: int) -> Tensor:
    """The bit-reversal permutation ``beta [order]`` (int64): column ``j`` of ``x Pbr`` is column ``beta[j]`` of ``x``.

    For ``order = m 2^k`` it is the mixed-radix digit reversal: with j = a m + b, the low digit b becomes the high one.
    """
    split = _split_order(order)
    m, power = split if split is not None else (order, 1)
    bits = power.bit_length() - 1
    reversed_high = [int(format(a, f"0{bits}b")[::-1], 2) if bits else 0 for a in range(power)]
    return torch.tensor([b * power + reversed_high[a] for a in range(power) for b in range(m)])


@contextmanager
def _one_thread() -> Iterator[None]:
    """LAPACK on small matrices wants no more: rotations of 14 layers took 22 s with 32 threads, and 0.9 s with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def eigenbasis(c_KDD: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[K, D]`` descending and eigenvectors ``[K, D, D]`` in columns of symmetric float64 matrices.

    The sign of an eigenvector is free; here the component of largest magnitude is positive, so that two runs agree.
    """
    with _one_thread():
        values, vectors = torch.linalg.eigh(c_KDD)
    values, vectors = values.flip(-1), vectors.flip(-1)
    largest = vectors.abs().argmax(dim=-2, keepdim=True)
    return values, vectors * vectors.gather(-2, largest).sign()


@cache
def random_orthogonal(order: int, seed: int) -> Tensor:
    """A random orthogonal matrix, Haar distributed, float64: the Q factor of a Gaussian matrix with R's diagonal positive."""
    gaussian = torch.randn(order, order, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()
