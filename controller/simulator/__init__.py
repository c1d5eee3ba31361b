"""A modelled world for the controller: links, models, machines, documents and loads, and how well loads went."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.controller.policies.named import policy_named, policy_names
    from kvwire.controller.repair import decibels
    from kvwire.controller.simulator.loads import LoadArrival, Outcome, Span, Trouble
    from kvwire.controller.simulator.machines import MACHINES, Machine, costs, machine_named
    from kvwire.controller.simulator.metrics import Scored, Summary
    from kvwire.controller.simulator.models import MODELS, Model, model_named
    from kvwire.controller.simulator.offline_optimum import Optimum, optimum
    from kvwire.controller.simulator.rates import (
        ar1,
        constant,
        parse_log_json,
        parse_mbit_lines,
        steps,
        token_bucket,
        with_outages,
    )
    from kvwire.controller.simulator.scenario import Scenario, settings_for, simulate, variants_for
    from kvwire.controller.simulator.sizes import (
        documents_for,
        expected_kl,
        measured,
        raw_of,
        source_in_words,
    )
    from kvwire.controller.simulator.steering import Steering
    from kvwire.controller.simulator.world import World
    from kvwire.types.rates import RateTrace

__all__ = [
    "MACHINES",
    "MODELS",
    "LoadArrival",
    "Machine",
    "Model",
    "Optimum",
    "Outcome",
    "RateTrace",
    "Scenario",
    "Scored",
    "Span",
    "Steering",
    "Summary",
    "Trouble",
    "World",
    "ar1",
    "constant",
    "costs",
    "decibels",
    "documents_for",
    "expected_kl",
    "machine_named",
    "measured",
    "model_named",
    "optimum",
    "parse_log_json",
    "parse_mbit_lines",
    "policy_named",
    "policy_names",
    "raw_of",
    "settings_for",
    "simulate",
    "source_in_words",
    "steps",
    "token_bucket",
    "variants_for",
    "with_outages",
]

__getattr__ = lazy(__name__)
