"""The processes of a run: what is started, watched, evaluated and ended."""
