"""The cases, a module a subject. Importing a module registers its cases."""
