"""A run as one HTML page: verdict, alarms, curves, samples, configuration; or two runs side by side."""
