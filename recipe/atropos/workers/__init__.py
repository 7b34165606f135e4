"""The trainer's ranks under Ray, as the driver calls them."""
