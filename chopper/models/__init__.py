"""Shapes of models: named architectures, and the configurations of others."""
