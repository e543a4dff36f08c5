"""Random layers of a packed cache."""

from dataclasses import replace

import torch

from kvcompile.codec import LayerCache, PageFormat, PageTables, RowFormat, RowTables, encode_pages, feedback_factor


def random_tables(fmt: PageFormat, num_kv_heads: int, seed: int = 0) -> PageTables:
    """What the rows of a format need to be coded: factors for error feedback, and centroids."""
    generator = torch.Generator().manual_seed(seed)

    def tables(row: RowFormat) -> RowTables:
        shape = num_kv_heads, 4 * row.head_dim, row.head_dim
        samples = torch.randn(shape, generator=generator, dtype=torch.float64).cumsum(dim=-1)
        factor = feedback_factor(samples.mT @ samples, damping=0.2) if row.rounding == "error_feedback" else None
        return RowTables(factor, samples[:, : row.centroids].float() if row.centroids else None)

    return PageTables(tables(fmt.key), tables(fmt.value))


def random_layer(
    fmt: PageFormat, num_kv_heads: int, num_tokens: list[int], sink: int, ring: int, seed: int = 0
) -> LayerCache:
    """A ragged batch of random tokens, its pages scattered over a pool that is larger than needed.

    A row keeps as few tokens in the ring as whole pages allow, except that odd rows fill it as far as they can. A ring
    of 0 slots needs rows of sink and whole pages.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, fmt.head_dim, generator=generator)

    batch = len(num_tokens)
    history = [max(n - sink, 0) for n in num_tokens]
    fewest = [-(-max(n - ring, 0) // fmt.tokens) for n in history]
    num_pages = [few if row % 2 else n // fmt.tokens for row, (n, few) in enumerate(zip(history, fewest, strict=True))]
    assert all(0 <= n - fmt.tokens * pages <= ring for n, pages in zip(history, num_pages, strict=True))

    pool = sum(num_pages) + 3
    unused = torch.randperm(pool, generator=generator).int()
    table_BN = torch.full((batch, max(num_pages) + 2), 2**30, dtype=torch.int32)  # a wrong read does not go unnoticed
    for row, pages in enumerate(num_pages):
        table_BN[row, :pages], unused = unused[:pages], unused[pages:]
    channel_scale = torch.linspace(0.1, 3, fmt.head_dim)
    k, v = (rows(pool, num_kv_heads, fmt.tokens) for _ in "kv")
    tables = random_tables(fmt, num_kv_heads, seed)
    return LayerCache(
        fmt,
        encode_pages(k, v * channel_scale + 0.5, fmt, tables),
        table_BN,
        torch.tensor(num_pages, dtype=torch.int32),
        torch.tensor(num_tokens, dtype=torch.int32),
        *(rows(batch, num_kv_heads, slots).bfloat16() for slots in (sink, sink, ring, ring)),
        tables,
    )


def on_device(layer: LayerCache) -> LayerCache:
    """The layer on the GPU, where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return replace(layer, **{name: x.to(device) for name, x in vars(layer).items() if isinstance(x, torch.Tensor)})
