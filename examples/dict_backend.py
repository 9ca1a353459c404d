"""A complete backend: pages in a dict. Run it: hicache-storage replay --backend dict_backend:DictStorage"""

from hicache_storage import Capabilities, HiCacheStorage


class DictStorage(HiCacheStorage):
    capabilities = Capabilities(delete=True)

    def __init__(self, settings, namespace):
        super().__init__(settings, namespace)
        self.pages = {}

    def get(self, key):
        return self.pages.get(key)

    def exists(self, key):
        return key in self.pages

    def set(self, key, value):
        self.pages[key] = bytes(value)

    def delete(self, keys):
        for key in keys:
            self.pages.pop(key, None)
