"""A seeded campaign of faults against a launch under checked load; `tools/chaos.py` runs it.

topologies.py  what is served: recipe, replicas, frontends
ways.py        every way in, and which processes a request of each needs
questions.py   what is asked, and the only right answers
load.py        the process that loads all ways, probes each, and asks for readiness; it prints records
records.py     what was seen: requests, probes, readiness, faults
observer.py    the campaign's side of the load process
launch.py      tools/serve.py as its user starts it: its processes, its log, what it leaves
faults.py      the faults: how each is done, to whom, what it excuses
garbage.py     clients that send anything but requests
verdict.py     which of what was seen must not be
campaign.py    one fault after the other, each to its recovery; the drain and the leak check at the end
cluster.py     several launches of one model, frontends without a server, etcd and nats-server
cluster_campaign.py  faults among these, the next before the last is over
memory.py      who lasted, and whether it grew
"""
