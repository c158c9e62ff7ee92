"""Programs that are written, run in a sandbox, and repaired."""
