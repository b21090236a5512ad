"""Kills a run on purpose, resumes it, and compares it with one that was left alone."""
