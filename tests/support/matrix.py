"""Few combinations that try every pair: faults come from two settings that meet, hardly ever from five."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

__all__ = ["Cell", "Dimensions", "Exclusions", "Setting", "every_cell", "label", "pairs_of", "pairwise"]

Setting = tuple[str, str]
"""A dimension and one of its values."""

Dimensions = Mapping[str, Sequence[str]]
"""The values of each dimension, the usual one first."""

Exclusions = Mapping[tuple[Setting, Setting], str]
"""Pairs that cannot be, and why."""

Cell = dict[str, str]
"""A value for each dimension."""


def pairs_of(dimensions: Dimensions) -> Iterator[tuple[Setting, Setting]]:
    """All pairs of values of two dimensions, in the order of the dimensions."""
    for (first, firsts), (second, seconds) in combinations(dimensions.items(), 2):
        for one, other in product(firsts, seconds):
            yield (first, one), (second, other)


def pairwise(dimensions: Dimensions, excluded: Exclusions) -> list[Cell]:
    """Cells in which every pair occurs that is not excluded; the same ones each time, and far fewer than the product.

    Greedy: each cell begins with a pair that is still missing, and takes in each other dimension the value that adds
    most missing pairs, or of several the one that has been in the fewest cells.

    :raises ValueError: a pair that is not excluded fits in no cell.
    """
    known = list(pairs_of(dimensions))
    if unknown := [pair for pair in excluded if pair not in known]:
        raise ValueError(f"excluded, but no pairs of these dimensions: {unknown}")
    forbidden = {frozenset(pair) for pair in excluded}
    used: Counter[Setting] = Counter()
    missing = dict.fromkeys(frozenset(pair) for pair in known if frozenset(pair) not in forbidden)

    def completed(chosen: list[Setting], rest: list[str]) -> list[Setting] | None:
        if not rest:
            return chosen
        name, *others = rest
        fitting = [
            (name, value)
            for value in dimensions[name]
            if not any(frozenset({(name, value), other}) in forbidden for other in chosen)
        ]
        gain = {one: sum(frozenset({one, other}) in missing for other in chosen) for one in fitting}
        for one in sorted(fitting, key=lambda one: (-gain[one], used[one])):
            if found := completed([*chosen, one], others):
                return found
        return None

    cells = []
    while missing:
        pair = sorted(next(iter(missing)), key=lambda setting: list(dimensions).index(setting[0]))
        found = completed(pair, [name for name in dimensions if name not in dict(pair)])
        if found is None:
            raise ValueError(f"{pair} fits in no cell: exclude it, and say why")
        for both in combinations(found, 2):
            missing.pop(frozenset(both), None)
        used.update(found)
        cells.append({name: dict(found)[name] for name in dimensions})
    return cells


def every_cell(dimensions: Dimensions, excluded: Exclusions) -> list[Cell]:
    """The full product, without the cells that have an excluded pair."""
    forbidden = [set(pair) for pair in excluded]
    cells = [dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values())]
    return [cell for cell in cells if not any(pair <= set(cell.items()) for pair in forbidden)]


def label(cell: Cell, dimensions: Dimensions) -> str:
    """The name of a cell: its values that are not the usual ones."""
    return "-".join(value for name, value in cell.items() if value != dimensions[name][0]) or "usual"
