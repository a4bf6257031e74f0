"""Steps that several schemes have, and whom their waits are for."""
