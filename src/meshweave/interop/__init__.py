"""torch's private interfaces: the only room that uses names of torch with a leading underscore, or code that differs
between its versions. One file per subject; it does not depend on the rest of meshweave. Nothing is imported here:
modules about DTensor or Inductor take a second to import, and few programs need them.
"""
