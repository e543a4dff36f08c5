"""Which columns of a row were real tokens: a run-length code that alternates padding, real, padding, ..., from padding on."""


def extend_runs(runs: list[int], row: list[bool]) -> None:
    """Append columns to a run-length code that alternates padding, real, padding, ... and starts with padding."""
    for real in row:
        if real == (len(runs) % 2 == 0):
            runs[-1] += 1
        else:
            runs.append(1)


def shorten_runs(runs: list[int], columns: int) -> int:
    """Take the last `columns` columns off a run-length code; how many of them were real."""
    real = 0
    while columns and runs:
        cut = min(columns, runs[-1])
        real += cut if len(runs) % 2 == 0 else 0
        runs[-1] -= cut
        columns -= cut
        if runs[-1] == 0 and len(runs) > 1:
            runs.pop()
        elif runs[-1] == 0:
            break
    return real
