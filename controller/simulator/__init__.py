"""A modelled world for the controller: links, models, machines and documents."""

from .machines import MACHINES, Machine, costs, machine_named
from .models import MODELS, Model, model_named
from .rates import RateTrace, ar1, constant, steps, token_bucket, with_outages
from .sizes import documents_for, raw_documents_for
from .traces import parse_log_json, parse_mbit_lines

__all__ = [
    "MACHINES",
    "MODELS",
    "Machine",
    "Model",
    "RateTrace",
    "ar1",
    "constant",
    "costs",
    "documents_for",
    "machine_named",
    "model_named",
    "parse_log_json",
    "parse_mbit_lines",
    "raw_documents_for",
    "steps",
    "token_bucket",
    "with_outages",
]
