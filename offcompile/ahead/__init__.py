"""Plans for models and machines that are not there: nothing is allocated, nothing runs."""
