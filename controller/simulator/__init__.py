"""A modelled world for the controller: links, models, machines, documents and loads, and how well loads went."""

from .contenders import policy_named, policy_names
from .machines import MACHINES, Machine, costs, machine_named
from .metrics import Scored, Summary, decibels
from .models import MODELS, Model, model_named
from .optimum import Optimum, optimum
from .outcome import Outcome, Span
from .rates import RateTrace, ar1, constant, steps, token_bucket, with_outages
from .scenario import Scenario, settings_for, simulate, variants_for
from .sizes import documents_for, measured, raw_documents_for, raw_of
from .traces import parse_log_json, parse_mbit_lines
from .world import Arrival, Trouble, World

__all__ = [
    "MACHINES",
    "MODELS",
    "Arrival",
    "Machine",
    "Model",
    "Optimum",
    "Outcome",
    "RateTrace",
    "Scenario",
    "Scored",
    "Span",
    "Summary",
    "Trouble",
    "World",
    "ar1",
    "constant",
    "costs",
    "decibels",
    "documents_for",
    "machine_named",
    "measured",
    "model_named",
    "optimum",
    "parse_log_json",
    "parse_mbit_lines",
    "policy_named",
    "policy_names",
    "raw_documents_for",
    "raw_of",
    "settings_for",
    "simulate",
    "steps",
    "token_bucket",
    "variants_for",
    "with_outages",
]
