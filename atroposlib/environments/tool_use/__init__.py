"""Shared by environments with tools: rules for comparing calls, problems, and tools that run."""
