"""Prediction of a script's device memory on a machine that has no such device."""
