"""Integration with verl: its worker group, engines, platform and registries."""
