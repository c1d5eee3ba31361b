"""Adapters to the engines that run models."""
