"""What attaches to verl: its worker group, engines, platform and registries."""
