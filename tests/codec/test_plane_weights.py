"""How planes compare in a fit."""

from __future__ import annotations

from dataclasses import replace

from kvwire.codec.fitting.metric import plane_weights
from kvwire.codec.fitting.statistics import Statistics
from kvwire.codec.planes import planes_of

from .synthetic import GQA


def test_the_first_layer_counts_twice_and_what_was_never_needed_a_little():
    planes, none = planes_of(GQA), (None,) * len(GQA)
    known = Statistics(none, none, sensitivity=dict.fromkeys(planes, 1.0))
    assert plane_weights(GQA, known, [], []) == {plane: 1.0 if plane[1] else 2.0 for plane in planes}
    never = replace(known, sensitivity={**known.sensitivity, ("value", 1): 0.0})
    assert 0 < plane_weights(GQA, never, [], [])["value", 1] < 0.1
