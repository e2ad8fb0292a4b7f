"""Videos and pictures: requests, jobs, results."""
