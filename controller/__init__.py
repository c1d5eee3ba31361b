"""Decisions without I/O: estimators, cost models, planner, session state machine, simulator."""
