"""A3: rows to slots of their own, results to slots of theirs; with flags beside rows, or in band."""
