"""What to send next: the state a decision may see, and the policies that decide. No input or output, no clock."""
