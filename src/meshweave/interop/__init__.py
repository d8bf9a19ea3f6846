"""What torch keeps to itself: the only room that touches names of torch with a leading underscore, or what differs
between its versions. One file per subject; it knows nothing of the rest of meshweave.

Nothing is imported here: what concerns DTensor or Inductor takes a second to import, and few programs ask for it.
"""
