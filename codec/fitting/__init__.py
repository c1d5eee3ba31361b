"""Fit a profile: moments, metrics, predictors and tables from calibration caches."""
