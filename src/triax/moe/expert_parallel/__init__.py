"""Sends tokens to the devices that hold their experts, and sums the rows that come back."""
