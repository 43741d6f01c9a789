"""What users do with whole programs: tune them, and see what was chosen."""
