"""The watchdog: rules over a small history of a run, each of which names one cause of a run that goes wrong."""
