"""What we know about torch's own types beyond its public surface: DTensor, DeviceMesh, schedulers. Nobody else does.

Nothing is imported here: what concerns DTensor takes a second to import, and few programs ask for it.
"""
