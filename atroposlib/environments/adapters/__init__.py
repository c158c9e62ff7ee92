"""Environments of other frameworks: one file each, which imports its framework when it is used.

In the YAML of `atropos datagen`: `environment: {adapter: textarena, id: Sudoku-v0}`.
"""
