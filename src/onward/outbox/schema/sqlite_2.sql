-- SQLite has no stored functions, so this version only has its number.
UPDATE {table}_meta SET value = '2' WHERE name = 'version';
