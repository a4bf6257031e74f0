"""What serves one communicator: windows, rounds, waits, and what is said when they fail."""
