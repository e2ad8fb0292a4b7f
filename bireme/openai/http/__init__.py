"""HTTP as the frontend needs it: requests, replies, events, and the processes that share a port."""
