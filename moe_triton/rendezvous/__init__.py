"""How ranks meet over their group's store, whatever state the group is in."""
