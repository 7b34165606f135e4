"""The rules, in files that ``watchdog/alarms.py`` finds: each declares alarms at the functions that find them."""
