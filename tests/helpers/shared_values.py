"""Hypothesis strategies of what shared containers hold, and equality that tells types, nan and -0.0 apart."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # surrogates too
INTS = st.one_of(
    st.integers(), st.integers(-(2**64), 2**64), st.integers(-3, 300), st.integers(-(2**5000), 2**5000)
)
SCALARS = st.one_of(
    st.none(), st.booleans(), INTS, st.floats(), st.complex_numbers(), TEXT, st.binary(max_size=12)
)
HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), INTS, st.floats(allow_nan=False), TEXT, st.binary(max_size=12)),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(SCALARS, st.binary(max_size=9).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
    ),
    max_leaves=12,
)
KEYS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        INTS,
        st.integers(-2, 2),
        st.floats(allow_nan=False),
        TEXT,
        st.binary(max_size=9),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


def form(value: object) -> object:
    """A form that is equal for two values of the same types and bits, all the way down."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (list, tuple):
        return kind, tuple(map(form, value))
    if kind is dict:
        return kind, tuple((form(key), form(one)) for key, one in value.items())
    if kind in (set, frozenset):
        return kind, frozenset(map(form, value))
    return kind, bytes(value) if kind is bytearray else value
