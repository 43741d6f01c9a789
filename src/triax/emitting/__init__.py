"""From compiled launches to the custom call in a program; and a program's calls, read back."""
