"""Adapters between kvwire and the engines that run models."""
