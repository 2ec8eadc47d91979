"""Files, memory, numbers for people, figures and pages."""
