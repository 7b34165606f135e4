"""What verl needs to run where it ships no platform of its own."""
