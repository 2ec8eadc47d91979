"""What may be dropped, and when: one file per method."""
