"""What is checked, a module for each stage: functions that ranks run, and the list of checks that run them."""
