"""The time that steps take: measured, kept, corrected."""
