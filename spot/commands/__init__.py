"""What each verb of the command line does: a function whose signature is its options."""
